"""What tells runs apart: the fingerprint that a resume compares, digests of what a run computed, and their replay."""
