"""Drafters: whatever guesses the next tokens. A drafter decides speed, never text."""
