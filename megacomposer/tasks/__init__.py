"""Task making: feature deletion, commits, difficulty, record formats. No torch here."""
