//! How associations end, and what can still be taken then.

use super::*;
