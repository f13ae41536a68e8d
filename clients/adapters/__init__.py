"""Other libraries' models and other people's apps as clients: PyTorch, scikit-learn, ClientApps."""
