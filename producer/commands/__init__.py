"""The commands of `producer`, by what they are for; each module adds its own to the command line."""
