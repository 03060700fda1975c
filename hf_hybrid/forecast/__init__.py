"""The forecast of the final loss: what it is made from (`final_loss`), and while a run goes on (`run_forecast`)."""
