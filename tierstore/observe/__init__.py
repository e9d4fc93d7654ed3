"""OBSERVE: records what a store does, as statistics, traces and metrics. Makes no decisions."""
