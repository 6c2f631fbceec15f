"""The tests of promptmill."""
