"""TRL's trainers, without the work that changes nothing. This needs `pip install "hf-hybrid[trl]"`."""
