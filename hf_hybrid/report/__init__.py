"""Read the folder of a run, without torch: findings, pages and plots."""
