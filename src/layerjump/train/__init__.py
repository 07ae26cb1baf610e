"""Training: penalties on how far levels lie apart, small models made with them, fine-tuning."""
