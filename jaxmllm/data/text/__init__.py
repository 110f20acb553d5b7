"""Conversations: from a record to token ids, targets and positions."""
