"""From `key=value` arguments to checked settings: keys, profiles of sites, env files, help. Never
imports torch.
"""
