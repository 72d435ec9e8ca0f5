//! Engines against hand-made bytes and against each other.
