"""Train small models with penalties on hidden states; fine-tune."""
