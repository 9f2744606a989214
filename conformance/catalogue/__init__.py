"""What each stage is, what is hunted and how a bound is derived, in words."""
