//! Messages are understood as they were sent, and nothing else is.

use super::*;

const HERE: Address = Address::v4([127, 0, 0, 1], 80);

#[test]
fn requests_are_understood() {
    let all = [
        Request::Attach { version: 1 },
        Request::Fork,
        Request::Exec,
        Request::Resume,
        Request::Held { entry: 3 },
        Request::HeldListener { listener: 4 },
        Request::Listen { at: HERE, backlog: 5, shared: true, v6_only: false },
        Request::Listen { at: Address::ANY, backlog: 4096, shared: false, v6_only: true },
        Request::Unlisten { listener: 7 },
        Request::Accept { listener: 7 },
        Request::Connect { to: HERE, from: Address::ANY },
        Request::Close { entry: 9 },
        Request::Share { on: true },
        Request::Share { on: false },
        Request::Peer { entry: 9 },
        Request::Report,
        Request::Function { bytes: 100 },
    ];
    for request in all {
        let mut bytes = request.encode();
        assert_eq!(Request::decode(&bytes), Some(request));
        assert_eq!(Request::decode(&bytes[..63]), None);
        bytes[63] = 1;
        assert_eq!(Request::decode(&bytes), None, "{request:?} with rubbish");
        bytes = request.encode();
        bytes[0] = 99;
        assert_eq!(Request::decode(&bytes), None);
    }
}

#[test]
fn replies_are_understood() {
    let place = Place { stream: 0xf_ffff, side: 1, engine: true, same_tenant: false, link: 4095 };
    let endpoint = Endpoint { entry: 3, place, local: HERE, peer: Address::ANY };
    let all = [
        Reply::Refused(111),
        Reply::Done,
        Reply::Attached { entries: 1 << 20, links: 4096 },
        Reply::Listening { listener: 1, at: HERE },
        Reply::Connected { endpoint, new_link: true, group: 0, peer_later: true },
        Reply::Connected { endpoint, new_link: false, group: 7, peer_later: false },
        Reply::Report { bytes: 12 },
    ];
    for reply in all {
        assert_eq!(Reply::decode(&reply.encode()), Some(reply));
    }
    assert_eq!(Reply::decode(&[0; REPLY]), None);
    let mut filled = Reply::Done.encode();
    filled[8..].fill(1);
    assert_eq!(Reply::decode(&filled), Some(Reply::Done), "a later engine may fill the rest");
    assert_eq!(Place::decode(0), None);
}

#[test]
fn addresses_tell_what_they_are() {
    assert!(HERE.is_loopback() && !HERE.is_unspecified());
    assert!(Address::ANY.is_unspecified() && Address::v4([0; 4], 9).is_unspecified());
    assert_eq!((HERE.as_v4(), Address::ANY.as_v4()), (Some([127, 0, 0, 1]), None));
}

#[test]
fn fields_are_where_the_head_says() {
    let listen = Request::Listen { at: HERE, backlog: 5, shared: true, v6_only: true }.encode();
    assert_eq!(listen[..16], [3, 0, 0, 0, 3, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!((&listen[16..32], &listen[32..34]), (&HERE.ip[..], &80u16.to_le_bytes()[..]));
    let connect = Request::Connect { to: Address::ANY, from: HERE }.encode();
    assert_eq!((connect[0], &connect[40..56]), (6, &HERE.ip[..]));
    let place = Place { stream: 1, side: 0, engine: false, same_tenant: true, link: 2 };
    let endpoint = Endpoint { entry: 3, place, local: HERE, peer: Address::ANY };
    let connected = Reply::Connected { endpoint, new_link: true, group: 7, peer_later: true };
    let connected = connected.encode();
    assert_eq!(connected[..16], [0, 0, 0, 0, 4, 3, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(connected[16..24], place.encode().to_le_bytes());
    assert_eq!((connected[24], &connected[40..56]), (7, &HERE.ip[..]));
    assert_eq!(Reply::Refused(111).encode()[..8], [111, 0, 0, 0, 0, 0, 0, 0]);
}
