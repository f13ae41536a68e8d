"""One real node or helper: its operator's file, the SuperNode that carries its messages, its log and its diagnosis."""
