"""TRUSTED: order, ledger, budgets, official files. Runs no code of a bundle."""
