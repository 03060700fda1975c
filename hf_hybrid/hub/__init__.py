"""What the Hub gets of a run: the model card, where its facts come from, and pushing."""
