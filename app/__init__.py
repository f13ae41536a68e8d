"""The Flower App: server and client app, run configuration, tasks, reproductions and the ``murmurfl`` command."""
