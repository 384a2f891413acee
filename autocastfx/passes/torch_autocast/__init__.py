"""The rewrite that casts where torch.autocast would, op by op."""
