"""Optional features of a run that a strategy file chooses under ``extensions``; FedSync ships none of its own yet."""
