"""What a checkpoint holds, how it is written whole, and how a run goes on from it."""
