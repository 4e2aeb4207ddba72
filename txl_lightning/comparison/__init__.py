"""What `txl compare` does: several memories trained under one budget, laid side by side."""
