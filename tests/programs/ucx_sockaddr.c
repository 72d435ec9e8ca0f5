/* ucx_sockaddr -p PORT [HOST]: UCX's client and server by addresses of sockets. The server returns
 * each tagged message; the client checks what it gets. Prints "N messages". */
#include <arpa/inet.h>
#include <netdb.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <ucp/api/ucp.h>

#define TAG 0x7471

static const size_t sizes[] = { 1, 8, 1000, 65536, 1 << 20, 0 };

static ucp_worker_h worker;
static ucp_conn_request_h request;
static int ended;

__attribute__((noreturn, format(printf, 1, 2))) static void die(const char *format, ...)
{
	va_list list;
	va_start(list, format);
	vfprintf(stderr, format, list);
	va_end(list);
	fputc('\n', stderr);
	exit(1);
}

static void good(const char *what, ucs_status_t status)
{
	if (status != UCS_OK)
		die("%s: %s", what, ucs_status_string(status));
}

static void requested(ucp_conn_request_h asks, void *argument)
{
	(void)argument;
	request = asks;
}

/* The peer's end of the connection ends it here too. */
static void failed(void *argument, ucp_ep_h ep, ucs_status_t status)
{
	(void)argument;
	(void)ep;
	ended = 1;
	if (status != UCS_ERR_CONNECTION_RESET)
		fprintf(stderr, "endpoint: %s\n", ucs_status_string(status));
}

/* Waits for an operation. */
static void wait_for(const char *what, void *operation)
{
	if (!operation)
		return;
	if (UCS_PTR_IS_ERR(operation))
		die("%s: %s", what, ucs_status_string(UCS_PTR_STATUS(operation)));
	ucs_status_t status;
	while ((status = ucp_request_check_status(operation)) == UCS_INPROGRESS)
		ucp_worker_progress(worker);
	ucp_request_free(operation);
	good(what, status);
}

static void send_message(ucp_ep_h ep, const void *bytes, size_t len)
{
	ucp_request_param_t none = { 0 };
	wait_for("send", ucp_tag_send_nbx(ep, bytes, len, TAG, &none));
}

static void receive(void *bytes, size_t len)
{
	ucp_request_param_t none = { 0 };
	wait_for("receive", ucp_tag_recv_nbx(worker, bytes, len, TAG, UINT64_MAX, &none));
}

static ucp_ep_h endpoint(ucp_ep_params_t params)
{
	ucp_ep_h ep;
	params.field_mask |= UCP_EP_PARAM_FIELD_ERR_HANDLER | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE;
	params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
	params.err_handler.cb = failed;
	good("ucp_ep_create", ucp_ep_create(worker, &params, &ep));
	return ep;
}

static void serve(struct sockaddr_in place)
{
	ucp_listener_params_t params = {
		.field_mask = UCP_LISTENER_PARAM_FIELD_SOCK_ADDR | UCP_LISTENER_PARAM_FIELD_CONN_HANDLER,
		.sockaddr = { (struct sockaddr *)&place, sizeof place },
		.conn_handler = { .cb = requested },
	};
	ucp_listener_h listener;
	good("ucp_listener_create", ucp_listener_create(worker, &params, &listener));
	while (!request)
		ucp_worker_progress(worker);
	ucp_ep_h ep = endpoint((ucp_ep_params_t){ .field_mask = UCP_EP_PARAM_FIELD_CONN_REQUEST, .conn_request = request });
	int messages = 0;
	for (const size_t *size = sizes; *size; size++, messages++) {
		uint8_t *bytes = calloc(1, *size);
		receive(bytes, *size);
		send_message(ep, bytes, *size);
		free(bytes);
	}
	while (!ended)
		ucp_worker_progress(worker);
	ucp_listener_destroy(listener);
	printf("%d messages\n", messages);
}

static void ask(struct sockaddr_in place)
{
	ucp_ep_h ep = endpoint((ucp_ep_params_t){
		.field_mask = UCP_EP_PARAM_FIELD_FLAGS | UCP_EP_PARAM_FIELD_SOCK_ADDR,
		.flags = UCP_EP_PARAMS_FLAGS_CLIENT_SERVER,
		.sockaddr = { (struct sockaddr *)&place, sizeof place },
	});
	int messages = 0;
	for (const size_t *size = sizes; *size; size++, messages++) {
		uint8_t *bytes = malloc(*size), *back = calloc(1, *size);
		for (size_t i = 0; i < *size; i++)
			bytes[i] = (uint8_t)(i * 31 + i / 251 + messages + 1);
		send_message(ep, bytes, *size);
		receive(back, *size);
		if (memcmp(bytes, back, *size))
			die("message %d came back different", messages);
		free(bytes);
		free(back);
	}
	ucp_request_param_t none = { 0 };
	wait_for("close", ucp_ep_close_nbx(ep, &none));
	printf("%d messages\n", messages);
}

int main(int argc, char **argv)
{
	struct sockaddr_in place = { .sin_family = AF_INET };
	int option;
	while ((option = getopt(argc, argv, "p:")) != -1)
		switch (option) {
		case 'p': place.sin_port = htons(atoi(optarg)); break;
		default: die("usage: ucx_sockaddr -p PORT [HOST]");
		}
	if (optind < argc && !inet_pton(AF_INET, argv[optind], &place.sin_addr))
		die("no address: %s", argv[optind]);

	ucp_params_t params = { .field_mask = UCP_PARAM_FIELD_FEATURES, .features = UCP_FEATURE_TAG };
	ucp_worker_params_t of_worker = { .field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE, .thread_mode = UCS_THREAD_MODE_SINGLE };
	ucp_config_t *config;
	ucp_context_h context;
	good("ucp_config_read", ucp_config_read(NULL, NULL, &config));
	good("ucp_init", ucp_init(&params, config, &context));
	ucp_config_release(config);
	good("ucp_worker_create", ucp_worker_create(context, &of_worker, &worker));
	if (optind < argc)
		ask(place);
	else
		serve(place);
	ucp_worker_destroy(worker);
	ucp_cleanup(context);
	return 0;
}
