//! The system tests, one module per topic.

mod wire_capture;
