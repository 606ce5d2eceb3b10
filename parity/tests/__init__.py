"""Tests of the tools around the claims, and the proofs that the claims can fail."""
