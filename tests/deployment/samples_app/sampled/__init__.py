"""A project with a module, a loss and samples: see client_app.py."""
