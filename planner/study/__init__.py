"""Strategies side by side: what each step of training takes, by component and place."""
