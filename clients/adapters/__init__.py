"""Other libraries' models and other people's apps as machines: PyTorch, scikit-learn, ClientApps."""
