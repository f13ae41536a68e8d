"""What a node of ours never executes."""

from flwr.clientapp import ClientApp

app = ClientApp()
