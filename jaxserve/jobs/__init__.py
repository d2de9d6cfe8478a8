"""Offline jobs: a file of requests in, a file of answers out, on one machine or many."""
