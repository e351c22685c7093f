"""Tests of workloads, the bench and its report."""
