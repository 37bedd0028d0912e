"""Looks at runs, bundles and machines: verify, try, densify, the functional check, doctor."""
