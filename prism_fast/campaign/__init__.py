"""Many bundles on many machines: every (bundle, seed) is one `prism-fast score`, run where there is room for it."""
