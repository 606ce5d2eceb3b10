"""Tests of the harness itself: every comparator is seen to fail."""
