//! Calls with several pieces or several messages: readv(2), sendmsg(2), recvmmsg(2).
//!
//! The pieces are an iterator, and a function moves one of them, so that nothing here knows a
//! connection or the caller's memory.

use libc::c_int;
use slipway_socket::Errno;

/// The most bytes of a message that any FIFO has room for when it is empty.
const PAGE: usize = 4096;

/// Returns the sum of the lengths of pieces, which a program may make up.
pub fn total(lengths: impl Iterator<Item = usize>) -> usize {
    lengths.fold(0, usize::saturating_add)
}

/// Returns the bytes of a message that a FIFO is to have room for before the first of several
/// pieces is sent. Returns `None` for a message for which there is room anyway, or of one piece.
pub fn expected(lengths: impl ExactSizeIterator<Item = usize>) -> Option<usize> {
    let count = lengths.len();
    let all = total(lengths);
    (all > PAGE && count > 1).then_some(all)
}

/// Sends the pieces in turn, each by `send` with the flags of its call, and stops at the first that
/// is sent in part only. No piece is empty. Returns the number of bytes that were sent.
///
/// # Errors
/// The error of a piece, and that of `send` for the first piece: later ones end the call with what
/// was sent before, without `SIGPIPE`.
pub fn send<'a>(
    pieces: impl Iterator<Item = Result<&'a [u8], Errno>>,
    flags: c_int,
    mut send: impl FnMut(&[u8], c_int) -> Result<usize, Errno>,
) -> Result<usize, Errno> {
    let mut done = 0;
    for piece in pieces {
        let bytes = piece?;
        match send(bytes, if done > 0 { flags | libc::MSG_NOSIGNAL } else { flags }) {
            Ok(count) => {
                done += count;
                if count < bytes.len() {
                    break;
                }
            }
            Err(_) if done > 0 => break,
            Err(errno) => return Err(errno),
        }
    }
    Ok(done)
}

/// Fills the pieces in turn, each by `receive` with the flags of its call, and stops at the first
/// that is filled in part only. Waits for the first piece alone, unless `flags` have `MSG_WAITALL`.
/// `receive` also gets the number of bytes to skip: with `MSG_PEEK` those that earlier pieces have
/// seen, which are still there. No piece is empty. Returns the number of bytes that were received.
///
/// # Errors
/// The error of a piece, and that of `receive` for the first piece: later ones end the call with
/// what was received before.
pub fn receive<'a>(
    pieces: impl Iterator<Item = Result<&'a mut [u8], Errno>>,
    flags: c_int,
    mut receive: impl FnMut(&mut [u8], c_int, usize) -> Result<usize, Errno>,
) -> Result<usize, Errno> {
    let mut done = 0;
    for piece in pieces {
        let room = piece?;
        let more = done > 0 && flags & libc::MSG_WAITALL == 0;
        let skip = if flags & libc::MSG_PEEK != 0 { done } else { 0 };
        match receive(room, if more { flags | libc::MSG_DONTWAIT } else { flags }, skip) {
            Ok(count) => {
                done += count;
                if count < room.len() {
                    break;
                }
            }
            Err(_) if done > 0 => break,
            Err(errno) => return Err(errno),
        }
    }
    Ok(done)
}

/// Moves each message in turn, until `moves` fails or returns `false` for no message. `moves` also
/// gets whether the message is the first. Returns how many were moved.
///
/// # Errors
/// The error of the first message.
pub fn each_message<T>(
    messages: &mut [T],
    mut moves: impl FnMut(&mut T, bool) -> Result<bool, Errno>,
) -> Result<usize, Errno> {
    for (at, message) in messages.iter_mut().enumerate() {
        match moves(message, at == 0) {
            Ok(true) => {}
            Err(errno) if at == 0 => return Err(errno),
            Ok(false) | Err(_) => return Ok(at),
        }
    }
    Ok(messages.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    const PIECES: [&[u8]; 3] = [b"abc", b"de", b"fghi"];

    fn pieces() -> impl Iterator<Item = Result<&'static [u8], Errno>> {
        PIECES.into_iter().map(Ok)
    }

    #[test]
    fn lengths_that_a_program_makes_up_do_not_overflow() {
        assert_eq!(total([usize::MAX, 1, usize::MAX].into_iter()), usize::MAX);
        assert_eq!(total([].into_iter()), 0);
        assert_eq!(expected([usize::MAX, usize::MAX].into_iter()), Some(usize::MAX));
    }

    #[test]
    fn room_is_asked_for_only_if_it_may_be_too_little() {
        assert_eq!(expected([4096, 1].into_iter()), Some(4097));
        assert_eq!(expected([4095, 1].into_iter()), None);
        assert_eq!(expected([1 << 20].into_iter()), None, "one piece is sent as it is");
        assert_eq!(expected([].into_iter()), None);
    }

    #[test]
    fn pieces_are_sent_in_turn_and_only_the_first_may_raise_a_signal() {
        let mut calls = Vec::new();
        let sent = send(pieces(), libc::MSG_DONTWAIT, |bytes, flags| {
            calls.push((bytes.to_vec(), flags & libc::MSG_NOSIGNAL != 0));
            Ok(bytes.len())
        });
        assert_eq!(sent, Ok(9));
        let expected = [("abc", false), ("de", true), ("fghi", true)];
        assert_eq!(calls, expected.map(|(text, quiet)| (text.as_bytes().to_vec(), quiet)));
    }

    #[test]
    fn a_piece_that_is_sent_in_part_is_the_last() {
        let mut calls = 0;
        let sent = send(pieces(), 0, |bytes, _| {
            calls += 1;
            Ok(bytes.len().min(2))
        });
        assert_eq!((sent, calls), (Ok(2), 1));
    }

    #[test]
    fn an_error_counts_only_before_anything_was_sent() {
        assert_eq!(send(pieces(), 0, |_, _| Err(Errno::PIPE)), Err(Errno::PIPE));
        let mut results = [Ok(3), Err(Errno::PIPE)].into_iter();
        assert_eq!(send(pieces(), 0, |_, _| results.next().unwrap()), Ok(3));
        // A piece without memory is the program's fault, whatever was sent.
        let pieces = [Ok(&b"abc"[..]), Err(Errno::FAULT)];
        assert_eq!(send(pieces.into_iter(), 0, |bytes, _| Ok(bytes.len())), Err(Errno::FAULT));
        assert_eq!(send(std::iter::empty(), 0, |_, _| Err(Errno::PIPE)), Ok(0));
    }

    /// Receives "abcdefghi" into pieces of 3, 2 and 4 bytes. Returns the result and the flags of
    /// each call.
    fn received(flags: c_int, most: usize) -> (Result<usize, Errno>, Vec<c_int>, Vec<u8>) {
        let (mut memory, mut calls, mut from) = ([0; 9], Vec::new(), 0);
        let (first, rest) = memory.split_at_mut(3);
        let (second, third) = rest.split_at_mut(2);
        let got =
            receive([first, second, third].into_iter().map(Ok), flags, |room, flags, skip| {
                calls.push(flags);
                let begin = from + skip;
                let count = room.len().min(most - begin);
                room[..count].copy_from_slice(&b"abcdefghi"[begin..begin + count]);
                from += if flags & libc::MSG_PEEK != 0 { 0 } else { count };
                if count > 0 { Ok(count) } else { Err(Errno::AGAIN) }
            });
        (got, calls, memory.to_vec())
    }

    #[test]
    fn pieces_are_filled_in_turn_and_only_the_first_is_waited_for() {
        let quick = libc::MSG_DONTWAIT;
        assert_eq!(received(0, 9), (Ok(9), vec![0, quick, quick], b"abcdefghi".to_vec()));
        assert_eq!(received(0, 4), (Ok(4), vec![0, quick], b"abcd\0\0\0\0\0".to_vec()));
        assert_eq!(received(0, 3).0, Ok(3));
        assert_eq!(received(0, 0), (Err(Errno::AGAIN), vec![0], vec![0; 9]));
    }

    #[test]
    fn waitall_waits_for_each_piece_and_peek_goes_on_behind_what_it_has_seen() {
        assert_eq!(received(libc::MSG_WAITALL, 9).1, [libc::MSG_WAITALL; 3]);
        let (got, _, memory) = received(libc::MSG_PEEK, 9);
        assert_eq!((got, memory), (Ok(9), b"abcdefghi".to_vec()));
        assert_eq!(received(libc::MSG_PEEK, 4).0, Ok(4));
        assert_eq!(received(libc::MSG_PEEK, 3).0, Ok(3));
    }

    #[test]
    fn messages_are_moved_until_one_is_not() {
        let moved = |results: &[Result<bool, Errno>]| {
            let mut messages: Vec<_> = results.to_vec();
            each_message(&mut messages, |message, _| *message)
        };
        let (yes, no, failed) = (Ok(true), Ok(false), Err(Errno::AGAIN));
        assert_eq!(moved(&[yes, yes, yes]), Ok(3));
        assert_eq!(moved(&[yes, no, yes]), Ok(1));
        assert_eq!(moved(&[yes, yes, failed]), Ok(2));
        assert_eq!(moved(&[failed, yes]), Err(Errno::AGAIN));
        assert_eq!((moved(&[no]), moved(&[])), (Ok(0), Ok(0)));
        let mut firsts = Vec::new();
        let messages = &mut [(), ()];
        let all = each_message(messages, |(), is_first| {
            firsts.push(is_first);
            Ok(true)
        });
        assert_eq!((all, firsts), (Ok(2), vec![true, false]));
    }
}
