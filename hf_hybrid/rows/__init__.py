"""Rows that share: a batch as a prefix tree, attention along its paths, and the part that lays windows out so."""
