"""Measuring: workloads, drafters side by side, reports. Decides nothing about how a text is written."""
