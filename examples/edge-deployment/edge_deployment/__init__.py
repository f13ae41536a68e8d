"""Three clinics, each with samples, an operator's file and a ledger of its own, and a server none of them trusts."""
