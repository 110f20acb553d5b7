"""The models: towers, projectors and decoder, as pure functions of parameters and packed rows."""
