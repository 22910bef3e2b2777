"""What is shown of runs outside the terminal: an HTML page, and series for experiment trackers.
Never imports torch.
"""
