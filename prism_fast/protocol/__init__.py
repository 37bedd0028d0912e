"""Names and numbers of the contract. Imports nothing else of ours."""
