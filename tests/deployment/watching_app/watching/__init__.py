"""The app of the deployment tests: see server_app.py."""
