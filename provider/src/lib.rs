//! liburnic.so.

mod verbs;
