//! The view: tables and curves.

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Modifier, Style, Stylize as _};
use ratatui::text::Line;
use ratatui::widgets::{Paragraph, Row, Sparkline, Table, TableState};
use urnic_console::escaped;
use urnic_driver::watch::{QueuePair, Snapshot};

use super::sample::Device;
use super::state::State;
use crate::stat::{amount, errors, terminate, value};

const KEYS: &str = "Up/Down select   Enter queue pairs   Esc back   s order   p pause   h help   q quit";

const HELP: &str = "\
The list has the devices of your processes; Enter shows the queue pairs of one, Esc leads back.

TX-B/S, RX-B/S     bytes per second to and from streams
TX-M/S, RX-M/S     messages per second
ERRORS             CRC and marker errors, lost streams, Terminates, overflows of completion queues
SQ                 blocks of 64 B of the send queue that are not complete: one or more for each request
RQ                 receives that are posted and free
TRANSFER           how far the oldest Read is, or else the message that is being sent
VIA                who connected, and the way of the bytes: TCP, or memory that both ends share

s changes the order of the list: rate, errors, process. p or Space stops and continues.";

/// Draws all of it.
pub(super) fn draw(frame: &mut Frame<'_>, state: &State) {
    let [title, body, keys] =
        Layout::vertical([Constraint::Length(1), Constraint::Min(0), Constraint::Length(1)])
            .areas(frame.area());
    frame.render_widget(Line::from(heading(state)).bold(), title);
    frame.render_widget(Line::from(KEYS).dim(), keys);
    match &state.detail {
        _ if state.help => frame.render_widget(Paragraph::new(HELP), body),
        Some((device, selected)) => match state.now.of(device) {
            Some(one) => pairs(frame, body, state, device, one, *selected),
            None => frame.render_widget(format!("process {} has ended", device.pid), body),
        },
        None => list(frame, body, state),
    }
}

fn heading(state: &State) -> String {
    let total = |counter| {
        let rates = state.now.devices();
        let rates = rates.filter_map(|device| state.now.rate(&state.before, &device, counter));
        amount(rates.fold(0.0, |sum, rate| sum + rate))
    };
    let paused = if state.paused { "   paused" } else { "" };
    format!(
        "urnic top   {} devices   {} B/s out   {} B/s in   by {}{paused}",
        state.now.devices().count(),
        total("tx_bytes"),
        total("rx_bytes"),
        state.sort.name()
    )
}

/// A rate in a cell.
fn cell(rate: Option<f64>) -> String {
    rate.map_or_else(|| "-".to_owned(), amount)
}

/// What is shown by its rate.
const RATES: [&str; 4] = ["tx_bytes", "rx_bytes", "tx_messages", "rx_messages"];

fn list(frame: &mut Frame<'_>, area: Rect, state: &State) {
    let devices = state.sorted();
    let Some(selected) = devices.get(state.selected.min(devices.len().saturating_sub(1))) else {
        frame.render_widget("no process of yours has a urnic device open", area);
        return;
    };
    let rows = devices.iter().filter_map(|device| {
        let one = state.now.of(device)?;
        let mut row = vec![
            one.pid.to_string(),
            escaped(&one.name),
            escaped(&one.command),
            one.queue_pairs.len().to_string(),
        ];
        row.extend(RATES.map(|counter| cell(state.now.rate(&state.before, device, counter))));
        row.extend(["tx_bytes", "rx_bytes"].map(|name| amount(value(&one.counters, name) as f64)));
        row.push(errors(&one.counters).to_string());
        let row = Row::new(row);
        Some(match errors(&one.counters) {
            0 => row,
            _ => row.red(),
        })
    });
    let titles = [
        "PID", "DEVICE", "COMMAND", "QPS", "TX-B/S", "RX-B/S", "TX-M/S", "RX-M/S", "TX-BYTES", "RX-BYTES",
        "ERRORS",
    ];
    let widths = [8, 8, 16, 6, 7, 7, 7, 7, 8, 8, 6].map(Constraint::Length);
    let [above, curve] = Layout::vertical([Constraint::Min(0), Constraint::Length(3)]).areas(area);
    table(frame, above, rows.collect(), &titles, &widths, state.selected);
    curve_of(frame, curve, state, selected);
}

/// The bytes per second of a device as a curve.
fn curve_of(frame: &mut Frame<'_>, area: Rect, state: &State, device: &Device) {
    let rates = state.rates.get(device).map_or(&[][..], Vec::as_slice);
    let last = rates
        .get(rates.len().saturating_sub(area.width.into())..)
        .unwrap_or_default();
    let most = last.iter().copied().max().unwrap_or(0);
    let [name, curve] = Layout::vertical([Constraint::Length(1), Constraint::Min(0)]).areas(area);
    let title = format!(
        "{} of process {}: up to {} B/s",
        escaped(&device.name),
        device.pid,
        amount(most as f64)
    );
    frame.render_widget(Line::from(title).dim(), name);
    frame.render_widget(Sparkline::default().data(last), curve);
}

fn pairs(frame: &mut Frame<'_>, area: Rect, state: &State, device: &Device, one: &Snapshot, selected: usize) {
    let failures = u16::try_from(one.failures.len())
        .unwrap_or(u16::MAX)
        .min(area.height / 3);
    let [about, above, failed, curve] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Min(0),
        Constraint::Length(failures),
        Constraint::Length(3),
    ])
    .areas(area);
    let about_it = format!(
        "process {}, {}, {}: {} queue pairs, {} completion queues",
        one.pid,
        escaped(&one.command),
        escaped(&one.name),
        one.queue_pairs.len(),
        one.completion_queues
    );
    frame.render_widget(about_it, about);
    let rows = one.queue_pairs.iter().map(|pair| pair_row(state, device, pair));
    let titles = [
        "QPN",
        "STATE",
        "VIA",
        "SQ",
        "RQ",
        "TX-B/S",
        "RX-B/S",
        "TX-M/S",
        "RX-M/S",
        "TRANSFER",
        "PEER",
        "TERMINATE",
    ];
    let widths = [8, 5, 14, 5, 5, 6, 6, 6, 6, 12, 21, 15].map(Constraint::Length);
    table(frame, above, rows.collect(), &titles, &widths, selected);
    let failures: Vec<Line<'_>> = one
        .failures
        .iter()
        .map(|failure| Line::from(escaped(&failure.to_string())).red())
        .collect();
    frame.render_widget(Paragraph::new(failures), failed);
    curve_of(frame, curve, state, device);
}

fn pair_row(state: &State, device: &Device, pair: &QueuePair) -> Row<'static> {
    let way = pair.bytes.as_deref().unwrap_or("-");
    let who = if pair.rdma_cm { "rdma_cm" } else { "native" };
    let mut row = vec![
        format!("{:#08x}", pair.qpn),
        escaped(&pair.state),
        escaped(&format!("{who} {way}")),
        pair.send_blocks.to_string(),
        pair.receives.to_string(),
    ];
    row.extend(RATES.map(|counter| cell(state.now.pair_rate(&state.before, device, pair, counter))));
    row.push(transfer(pair));
    row.push(pair.remote.as_deref().map_or_else(|| "-".to_owned(), escaped));
    row.push(terminate(pair));
    Row::new(row)
}

/// How far the transfer under way is, and its length.
fn transfer(pair: &QueuePair) -> String {
    let (done, len) = (u64::from(pair.transfer_done), pair.transfer_len);
    match (done * 100).checked_div(len.into()) {
        Some(percent) => format!("{percent}% of {}", amount(len.into())),
        None => "-".to_owned(),
    }
}

fn table(
    frame: &mut Frame<'_>,
    area: Rect,
    rows: Vec<Row<'_>>,
    titles: &[&'static str],
    widths: &[Constraint],
    selected: usize,
) {
    let selected = selected.min(rows.len().saturating_sub(1));
    let mut state = TableState::new().with_selected(selected);
    let table = Table::new(rows, widths.iter().copied())
        .header(Row::new(titles.iter().copied()).bold())
        .row_highlight_style(Style::new().add_modifier(Modifier::REVERSED));
    frame.render_stateful_widget(table, area, &mut state);
}
