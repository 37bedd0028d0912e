"""TRUSTED: what turns predictions into sums, the same in whichever process predicts. Runs nothing of a bundle."""
