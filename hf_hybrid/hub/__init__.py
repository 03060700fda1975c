"""What goes to the Hub with a model: its card, and how pushing it is reported."""
