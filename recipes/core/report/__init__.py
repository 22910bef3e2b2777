"""What is shown of runs outside the terminal: an HTML page. Never imports torch."""
