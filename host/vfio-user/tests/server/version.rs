use crate::common::*;

fn proposal(major: u16, minor: u16, data: &[u8]) -> Vec<u8> {
    [&major.to_le_bytes()[..], &minor.to_le_bytes(), data].concat()
}

#[test]
fn the_reply_offers_no_more_than_was_proposed() {
    let served = serve();
    let mut raw = served.connect();
    let data = b"{\"capabilities\":{\"max_msg_fds\":8,\"unheard_of\":[1]},\"else\":null}\0";
    let reply = raw.call(Command::Version, &proposal(0, 0, data)).ok();
    assert_eq!(reply, proposal(0, 0, b"{\"capabilities\":{\"max_msg_fds\":16}}\0"));
    let stats = served.control.stats();
    assert!(stats.negotiated_at.unwrap() >= stats.connected_at.unwrap());
    assert_eq!(stats.client.unwrap().pid, std::process::id());
}

#[test]
fn nothing_is_answered_before_it() {
    let served = serve();
    let mut raw = served.connect();
    for code in (0..30).filter(|code| *code != Command::Version as u16) {
        let header = raw.header(code, 16);
        raw.send(&[header.as_bytes(), &[0; 16]].concat(), &[]);
        assert_eq!(raw.reply().err(), Errno::INVAL, "command {code}");
    }
    raw.negotiate();
    assert!(raw.is_alive());
}

#[test]
fn a_second_one_is_refused_and_changes_nothing() {
    let served = serve();
    let mut raw = served.client();
    assert_eq!(raw.call(Command::Version, &proposal(0, 1, b"")).err(), Errno::INVAL);
    assert!(raw.is_alive());
}

#[test]
fn what_is_not_understood_ends_the_connection() {
    let served = serve();
    for bad in [
        proposal(1, 0, b""),
        proposal(0, 1, b"{}"),
        proposal(0, 1, b"{\"capabilities\":{\"max_data_xfer_size\":\"many\"}}\0"),
        vec![0, 0, 0],
        vec![],
    ] {
        let mut raw = served.connect();
        assert_eq!(raw.call(Command::Version, &bad).err(), Errno::INVAL);
        assert!(raw.try_reply().is_none());
        eventually("cleared away", || served.control.stats().client.is_none());
    }
    assert!(served.client().is_alive());
}

#[test]
fn who_does_not_negotiate_in_time_is_hung_up_on() {
    let served = serve_with(|config| {
        config.handshake_deadline = std::time::Duration::from_millis(20);
    });
    assert!(served.connect().try_reply().is_none());
}
