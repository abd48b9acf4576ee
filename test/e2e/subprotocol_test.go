//go:build e2e

package e2e

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/gorilla/websocket"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/tools/remotecommand"
	"k8s.io/client-go/transport/spdy"
)

// subprotocols is how many connections kubectlSubprotocols upgrades.
const subprotocols = 4 + 5 + 2

// script writes to both outputs and ends with a code of its own.
const script = "echo out; echo err >&2; exit 7"

// kubectlSubprotocols: output, exit code and close frame of exec arrive by every subprotocol that a kubelet and an apiserver have
// between them, also by those that kubectl itself no longer offers (CASES S-06).
func kubectlSubprotocols(t *testing.T, ctx context.Context, k kubectlCase) {
	config, err := clientcmd.BuildConfigFromFlags("", k.config)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(ctx, settle)
	defer cancel()
	pod := config.Host + "/api/v1/namespaces/" + k.namespace + "/pods/web/"
	query := url.Values{"container": {"side"}, "command": {"sh", "-c", script}, "stdout": {"true"}, "stderr": {"true"}}
	// From the fourth version on it is a Status with the code in it, before that only words.
	const words, status = "command terminated with non-zero exit code: exit status 7", `"causes":[{"reason":"ExitCode","message":"7"}]`

	for protocol, want := range map[string]string{
		"v4.channel.k8s.io": "command terminated with exit code 7", // client-go has read the Status
		"v3.channel.k8s.io": words,
		"v2.channel.k8s.io": words,
		"channel.k8s.io":    "", // the kubelet's library resets the error stream before the command runs, as kubelets v1.0 did
	} {
		t.Run("SPDY "+protocol, func(t *testing.T) {
			out, errs, err := runSPDY(ctx, config, pod+"exec?"+query.Encode(), protocol)
			if out != "out\n" || errs != "err\n" || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
				t.Errorf("got %q, %q and %v, want the error %s", out, errs, err, want)
			}
		})
	}
	for _, protocol := range []string{
		"v5.channel.k8s.io", "v4.channel.k8s.io", "v4.base64.channel.k8s.io", "channel.k8s.io", "base64.channel.k8s.io",
	} {
		t.Run("WebSocket "+protocol, func(t *testing.T) {
			conn, err := dialWebSocket(ctx, config, pod+"exec?"+query.Encode(), protocol)
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			got, end := readChannels(conn)
			want := words
			if protocol[0] == 'v' {
				want = status
			}
			if got[1] != "out\n" || got[2] != "err\n" || !strings.Contains(got[3], want) {
				t.Errorf("got %q, want %s on channel 3", got, want)
			}
			if !websocket.IsCloseError(end, websocket.CloseNormalClosure) {
				t.Errorf("it ended with %v, want the close frame of a normal end", end)
			}
		})
	}
	for _, protocol := range []string{"v4.channel.k8s.io", "v4.base64.channel.k8s.io"} {
		t.Run("WebSocket port-forward "+protocol, func(t *testing.T) {
			var port uint16
			if _, err := fmt.Sscan(echoServer(t), &port); err != nil {
				t.Fatal(err)
			}
			conn, err := dialWebSocket(ctx, config, fmt.Sprint(pod, "portforward?ports=", port), protocol)
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			// Each of the two channels begins with the number of the port.
			prefix := binary.LittleEndian.AppendUint16(nil, port)
			want := append(bytes.Clone(prefix), "hello"...)
			kind, message := websocket.BinaryMessage, append([]byte{0}, "hello"...)
			if strings.Contains(protocol, "base64") {
				kind, message = websocket.TextMessage, []byte("0"+base64.StdEncoding.EncodeToString([]byte("hello")))
			}
			if err := conn.WriteMessage(kind, message); err != nil {
				t.Fatal(err)
			}
			var got [2][]byte
			for !bytes.Equal(got[0], want) || !bytes.Equal(got[1], prefix) {
				channel, data, err := readChannel(conn)
				if err != nil || channel > 1 {
					t.Fatalf("got %q, then channel %d and %v", got, channel, err)
				}
				got[channel] = append(got[channel], data...)
			}
		})
	}
}

// runSPDY runs the command of a URL and offers one subprotocol.
func runSPDY(ctx context.Context, config *rest.Config, address, protocol string) (out, errs string, err error) {
	target, err := url.Parse(address)
	if err != nil {
		return "", "", err
	}
	transport, upgrader, err := spdy.RoundTripperFor(config)
	if err != nil {
		return "", "", err
	}
	executor, err := remotecommand.NewSPDYExecutorForProtocols(transport, upgrader, http.MethodPost, target, protocol)
	if err != nil {
		return "", "", err
	}
	var stdout, stderr bytes.Buffer
	err = executor.StreamWithContext(ctx, remotecommand.StreamOptions{Stdout: &stdout, Stderr: &stderr})
	return stdout.String(), stderr.String(), err
}

// dialWebSocket opens a WebSocket and offers one subprotocol, which must be accepted. Reads of it fail after a while.
func dialWebSocket(ctx context.Context, config *rest.Config, address, protocol string) (*websocket.Conn, error) {
	tlsConfig, err := rest.TLSConfigFor(config)
	if err != nil {
		return nil, err
	}
	dialer := websocket.Dialer{TLSClientConfig: tlsConfig, Subprotocols: []string{protocol}}
	conn, response, err := dialer.DialContext(ctx, strings.Replace(address, "https:", "wss:", 1), nil)
	if err != nil {
		if response != nil {
			err = fmt.Errorf("%w: %s", err, response.Status)
		}
		return nil, err
	}
	if got := conn.Subprotocol(); got != protocol {
		return nil, errors.Join(fmt.Errorf("the server has chosen %q", got), conn.Close())
	}
	return conn, conn.SetReadDeadline(time.Now().Add(settle))
}

// readChannel reads one message and takes it apart.
func readChannel(conn *websocket.Conn) (channel int, data []byte, err error) {
	_, message, err := conn.ReadMessage()
	if err != nil {
		return 0, nil, err
	}
	if len(message) == 0 {
		return 0, nil, errors.New("a message without a channel")
	}
	channel, data = int(message[0]), message[1:]
	if strings.Contains(conn.Subprotocol(), "base64") {
		channel -= '0'
		data, err = base64.StdEncoding.DecodeString(string(data))
	}
	return channel, data, err
}

// readChannels reads to the end and returns what came on each channel, and how the end was told.
func readChannels(conn *websocket.Conn) (got [5]string, end error) {
	for {
		channel, data, err := readChannel(conn)
		if err == nil && channel >= len(got) {
			err = fmt.Errorf("a message on channel %d", channel)
		}
		if err != nil {
			return got, err
		}
		got[channel] += string(data)
	}
}
