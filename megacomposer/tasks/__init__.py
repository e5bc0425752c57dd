"""Task making: feature deletion, commit-derived tasks, difficulty, record formats. No torch here."""
