"""The Textual app. Nothing else in kvtop imports Textual."""
