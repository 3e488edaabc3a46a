"""Optional features of a run, listed under ``extensions`` in a strategy file; FedSync ships none of its own."""
