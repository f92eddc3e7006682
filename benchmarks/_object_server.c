/* A small S3 server in memory on loopback, so quick that a client is what is measured.

   It answers every request after a latency, and sends and receives at a bandwidth that all connections share. It
   knows one bucket for every name that is asked, and checks no signatures. One thread.

   server LATENCY_S BYTES_PER_S      (0: without limit)

   GET /_set?LATENCY_S,BYTES_PER_S,MOST_KEPT   sets them; larger objects than that are kept empty
   GET /_counts                      requests by kind since the last such call, and seconds of CPU */

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { N_KINDS = 6, N_BUCKETS = 1 << 16, MAX_HEAD = 32 << 10 };

static const char *KINDS[N_KINDS] = {"GET", "PUT", "HEAD", "DELETE", "POST", "LIST"};
static long counts[N_KINDS];
static double latency_s, bytes_per_s, down_free_at, up_free_at, most_kept = 1e18;
static int poll_fd;

static void *checked(void *memory) {
    if (memory == NULL) abort();
    return memory;
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

/* ---- texts that grow ---- */

typedef struct { char *data; size_t n, room; } Text;

static void reserve(Text *text, size_t more) {
    if (text->n + more <= text->room) return;
    text->room = (text->n + more) * 2;
    text->data = checked(realloc(text->data, text->room));
}

static void add(Text *text, const char *format, ...) {
    va_list list;
    va_start(list, format);
    char *more;
    int n = vasprintf(&more, format, list);
    va_end(list);
    if (n < 0) abort();
    reserve(text, n + 1);
    memcpy(text->data + text->n, more, n + 1);
    text->n += n;
    free(more);
}

/* ---- objects: immutable bytes by path, freed when nothing sends them ---- */

typedef struct { char *bytes; size_t n; long tag; int n_users; } Body;
typedef struct Object { char *path; Body *body; struct Object *next; } Object;

static Object *table[N_BUCKETS];
static long last_tag;

static void release(Body *body) {
    if (body != NULL && --body->n_users == 0) {
        free(body->bytes);
        free(body);
    }
}

static Object **find(const char *path) {
    uint64_t hash = 1469598103934665603u;
    for (const char *p = path; *p; p++) hash = (hash ^ (unsigned char)*p) * 1099511628211u;
    Object **place = &table[(hash ^ hash >> 32) % N_BUCKETS];
    while (*place != NULL && strcmp((*place)->path, path) != 0) place = &(*place)->next;
    return place;
}

static Body *put(const char *path, Body *body) {
    Object **place = find(path);
    if (*place == NULL) {
        *place = checked(calloc(1, sizeof(Object)));
        (*place)->path = checked(strdup(path));
    }
    release((*place)->body);
    body->n_users++;
    return (*place)->body = body;
}

static void delete(const char *path) {
    Object **place = find(path), *object = *place;
    if (object == NULL) return;
    *place = object->next;
    release(object->body);
    free(object->path);
    free(object);
}

/* ---- answers, and when they are sent ---- */

typedef struct Answer {
    double at;
    struct Connection *connection;
    Text head;
    Body *body;
    size_t start, stop, n_sent;
} Answer;

typedef struct Connection {
    int fd, n_waiting; /* answers that are not sent */
    bool is_closed, was_continued;
    Text in;
    size_t n_used;
    Answer *sending;
} Connection;

static Answer **heap;
static size_t n_heap, heap_room;

static void push(Answer *answer) {
    if (n_heap == heap_room) heap = checked(realloc(heap, (heap_room = heap_room * 2 + 64) * sizeof *heap));
    size_t i = n_heap++;
    for (; i > 0 && heap[(i - 1) / 2]->at > answer->at; i = (i - 1) / 2) heap[i] = heap[(i - 1) / 2];
    heap[i] = answer;
}

static Answer *pop(void) {
    Answer *first = heap[0], *last = heap[--n_heap];
    size_t i = 0;
    for (size_t child; (child = 2 * i + 1) < n_heap; i = child) {
        if (child + 1 < n_heap && heap[child + 1]->at < heap[child]->at) child++;
        if (last->at <= heap[child]->at) break;
        heap[i] = heap[child];
    }
    if (n_heap) heap[i] = last;
    return first;
}

static void drop(Connection *connection) {
    if (!connection->is_closed || connection->n_waiting) return;
    close(connection->fd);
    free(connection->in.data);
    free(connection);
}

static void finish(Answer *answer) {
    Connection *connection = answer->connection;
    release(answer->body);
    free(answer->head.data);
    free(answer);
    connection->sending = NULL;
    connection->n_waiting--;
}

/* Sends as much as the socket takes; the rest when it takes more. */
static void send_some(Answer *answer) {
    Connection *connection = answer->connection;
    size_t n_body = answer->stop - answer->start, total = answer->head.n + n_body;
    while (!connection->is_closed && answer->n_sent < total) {
        struct iovec parts[2];
        int n = 0;
        size_t done = answer->n_sent, n_head = answer->head.n;
        if (done < n_head) parts[n++] = (struct iovec){answer->head.data + done, n_head - done};
        size_t from = done > n_head ? done - n_head : 0;
        if (from < n_body) parts[n++] = (struct iovec){answer->body->bytes + answer->start + from, n_body - from};
        struct msghdr message = {.msg_iov = parts, .msg_iovlen = n};
        ssize_t sent = sendmsg(connection->fd, &message, MSG_NOSIGNAL);
        if (sent < 0 && (errno == EAGAIN || errno == EINTR)) {
            connection->sending = answer;
            struct epoll_event event = {EPOLLIN | EPOLLOUT, {.ptr = connection}};
            epoll_ctl(poll_fd, EPOLL_CTL_MOD, connection->fd, &event);
            return;
        }
        if (sent < 0) break; /* the client is gone */
        answer->n_sent += sent;
    }
    if (connection->sending != NULL) {
        struct epoll_event event = {EPOLLIN, {.ptr = connection}};
        epoll_ctl(poll_fd, EPOLL_CTL_MOD, connection->fd, &event);
    }
    finish(answer);
}

static double passes_at(double *free_at, double from, size_t n) {
    double end = (*free_at > from ? *free_at : from) + (bytes_per_s > 0 ? n / bytes_per_s : 0);
    return *free_at = end;
}

/* ---- requests ---- */

typedef struct {
    Connection *connection;
    int status;
    Text headers, text;       /* of the answer */
    Body *body;               /* of the answer, instead of text */
    size_t start, stop;
    bool is_head;
} Reply;

static void fail(Reply *reply, int status, const char *code) {
    reply->status = status;
    add(&reply->text, "<Error><Code>%s</Code><Message>%s</Message></Error>", code, code);
}

static const char *header(const char *head, const char *name) {
    static char value[4096];
    size_t n = strlen(name);
    for (const char *line = strchr(head, '\n'); line != NULL && line[1] != '\r'; line = strchr(line + 1, '\n')) {
        if (strncasecmp(line + 1, name, n) != 0 || line[n + 1] != ':') continue;
        const char *p = line + n + 2, *end = strchr(p, '\r');
        while (*p == ' ') p++;
        size_t length = (size_t)(end - p) < sizeof value - 1 ? (size_t)(end - p) : sizeof value - 1;
        memcpy(value, p, length);
        value[length] = 0;
        return value;
    }
    return NULL;
}

static void unquote(char *text) {
    char *out = text;
    for (unsigned byte; *text; text++) {
        if (*text == '%' && sscanf(text + 1, "%2x", &byte) == 1) *out++ = (char)byte, text += 2;
        else *out++ = *text;
    }
    *out = 0;
}

static void take_put(Reply *reply, const char *head, const char *path, const char *data, size_t n) {
    Object *old = *find(path);
    const char *asked = header(head, "if-none-match");
    if (asked != NULL && old != NULL) return fail(reply, 412, "PreconditionFailed");
    if ((asked = header(head, "if-match")) != NULL) {
        if (old == NULL) return fail(reply, 404, "NoSuchKey");
        if (strtol(asked + 1, NULL, 10) != old->body->tag) return fail(reply, 412, "PreconditionFailed");
    }
    Body *body = NULL;
    if ((asked = header(head, "x-amz-copy-source")) != NULL) {
        char source[4096];
        snprintf(source, sizeof source, "%s%s", asked[0] == '/' ? "" : "/", asked);
        unquote(source);
        Object *from = *find(source);
        if (from == NULL) return fail(reply, 404, "NoSuchKey");
        body = from->body;
        add(&reply->text, "<CopyObjectResult><ETag>\"%ld\"</ETag></CopyObjectResult>", body->tag);
    } else {
        body = checked(calloc(1, sizeof *body));
        if (n > most_kept) n = 0;
        body->bytes = checked(malloc(n + 1));
        memcpy(body->bytes, data, n);
        body->n = n;
        body->tag = ++last_tag;
    }
    put(path, body);
    add(&reply->headers, "ETag: \"%ld\"\r\n", body->tag);
}

static void take_get(Reply *reply, const char *head, const char *path) {
    Object *object = *find(path);
    if (object == NULL) return fail(reply, 404, "NoSuchKey");
    Body *body = object->body;
    size_t first = 0, last = body->n - 1;
    const char *asked = header(head, "range");
    if (asked != NULL) {
        int n = sscanf(asked, "bytes=%zu-%zu", &first, &last);
        if (n < 1 || first >= body->n) return fail(reply, 416, "InvalidRange");
        if (last >= body->n) last = body->n - 1;
        reply->status = 206;
        add(&reply->headers, "Content-Range: bytes %zu-%zu/%zu\r\n", first, last, body->n);
    }
    add(&reply->headers, "ETag: \"%ld\"\r\nLast-Modified: Thu, 01 Jan 2026 00:00:00 GMT\r\n", body->tag);
    body->n_users++;
    reply->body = body;
    reply->start = first;
    reply->stop = last + 1;
}

static int by_path(const void *a, const void *b) { return strcmp(*(char *const *)a, *(char *const *)b); }

static void take_list(Reply *reply, const char *bucket, char *query) {
    char prefix[4096] = "", delimiter = 0, folder[4096] = "", below[4200];
    for (char *part = strtok(query, "&"); part != NULL; part = strtok(NULL, "&")) {
        unquote(part);
        if (strncmp(part, "prefix=", 7) == 0) snprintf(prefix, sizeof prefix, "%s", part + 7);
        if (strncmp(part, "delimiter=", 10) == 0) delimiter = part[10];
    }
    size_t n_bucket = snprintf(below, sizeof below, "/%s/", bucket), n_below = strlen(below) + strlen(prefix);
    strncat(below, prefix, sizeof below - n_bucket - 1);
    char **paths = NULL;
    size_t n = 0, room = 0;
    for (size_t i = 0; i < N_BUCKETS; i++)
        for (Object *o = table[i]; o != NULL; o = o->next) {
            if (strncmp(o->path, below, n_below) != 0) continue;
            if (n == room) paths = checked(realloc(paths, (room = room * 2 + 64) * sizeof *paths));
            paths[n++] = o->path;
        }
    if (n) qsort(paths, n, sizeof *paths, by_path);
    add(&reply->headers, "Content-Type: application/xml\r\n");
    add(&reply->text, "<ListBucketResult><Name>%s</Name><Prefix>%s</Prefix><KeyCount>%zu</KeyCount>", bucket, prefix, n);
    add(&reply->text, "<MaxKeys>1000000</MaxKeys><IsTruncated>false</IsTruncated>");
    for (size_t i = 0; i < n; i++) {
        const char *key = paths[i] + n_bucket, *cut = delimiter ? strchr(paths[i] + n_below, delimiter) : NULL;
        if (cut != NULL) {
            size_t length = cut + 1 - key;
            if (strncmp(folder, key, length) == 0 && folder[length] == 0) continue;
            snprintf(folder, sizeof folder, "%.*s", (int)length, key);
            add(&reply->text, "<CommonPrefixes><Prefix>%s</Prefix></CommonPrefixes>", folder);
            continue;
        }
        Body *body = (*find(paths[i]))->body;
        add(&reply->text, "<Contents><Key>%s</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>", key);
        add(&reply->text, "<ETag>\"%ld\"</ETag><Size>%zu</Size></Contents>", body->tag, body->n);
    }
    add(&reply->text, "</ListBucketResult>");
    free(paths);
}

static void take_delete_many(Reply *reply, const char *bucket, char *text) {
    add(&reply->headers, "Content-Type: application/xml\r\n");
    add(&reply->text, "<DeleteResult>");
    for (char *key = strstr(text, "<Key>"), *end; key != NULL; key = strstr(end + 1, "<Key>")) {
        if ((end = strstr(key, "</Key>")) == NULL) break;
        *end = 0;
        char path[4096];
        snprintf(path, sizeof path, "/%s/%s", bucket, key + 5);
        delete(path);
        add(&reply->text, "<Deleted><Key>%s</Key></Deleted>", key + 5);
    }
    add(&reply->text, "</DeleteResult>");
}

static bool take_command(Reply *reply, const char *path, const char *query) {
    if (strcmp(path, "/_set") == 0) {
        sscanf(query, "%lf,%lf,%lf", &latency_s, &bytes_per_s, &most_kept);
        down_free_at = up_free_at = 0;
        return true;
    }
    if (strcmp(path, "/_counts") != 0) return false;
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    double cpu = usage.ru_utime.tv_sec + usage.ru_stime.tv_sec + (usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) * 1e-6;
    add(&reply->text, "{\"cpu_s\": %.6f", cpu);
    for (int i = 0; i < N_KINDS; i++)
        if (counts[i]) add(&reply->text, ", \"%s\": %ld", KINDS[i], counts[i]);
    add(&reply->text, "}");
    memset(counts, 0, sizeof counts);
    return true;
}

/* Answers one request; ``data`` holds its ``n`` bytes of body, and a byte after them that may be overwritten. */
static void take(Connection *connection, char *head, char *data, size_t n) {
    Reply reply = {.connection = connection, .status = 200};
    char method[16] = "", *target = strchr(head, ' ') + 1, *end = strchr(target, ' ');
    snprintf(method, sizeof method, "%.*s", (int)(target - 1 - head), head);
    char *path = checked(strndup(target, end - target)), *query = strchr(path, '?');
    if (query != NULL) *query++ = 0;
    unquote(path);
    char empty[1] = "", *slash = strchr(path + 1, '/'), *bucket;
    bool is_command = take_command(&reply, path, query != NULL ? query : empty);
    bool has_key = slash != NULL && slash[1] != 0;
    bucket = checked(slash != NULL ? strndup(path + 1, slash - path - 1) : strdup(path + 1));
    bool is_get = strcmp(method, "GET") == 0, is_list = is_get && !has_key;
    for (int i = 0; i < N_KINDS && !is_command; i++)
        if (strcmp(KINDS[i], is_list ? "LIST" : method) == 0) counts[i]++;
    reply.is_head = strcmp(method, "HEAD") == 0;
    if (is_command) { /* it is answered */
    } else if (strcmp(method, "PUT") == 0) take_put(&reply, head, path, data, n);
    else if (strcmp(method, "DELETE") == 0) delete(path), reply.status = 204;
    else if (strcmp(method, "POST") == 0) data[n] = 0, take_delete_many(&reply, bucket, data);
    else if (is_list) take_list(&reply, bucket, query != NULL ? query : empty);
    else take_get(&reply, head, path);

    Answer *answer = checked(calloc(1, sizeof *answer));
    size_t length = reply.body != NULL ? reply.stop - reply.start : reply.text.n;
    add(&answer->head, "HTTP/1.1 %d X\r\nContent-Length: %zu\r\n", reply.status, reply.status == 204 ? 0 : length);
    if (reply.headers.n) add(&answer->head, "%s", reply.headers.data);
    add(&answer->head, "\r\n%s", reply.text.n && !reply.is_head ? reply.text.data : "");
    answer->connection = connection;
    answer->body = reply.body;
    answer->start = reply.start;
    answer->stop = reply.is_head ? reply.start : reply.stop;
    double came = is_command ? 0 : passes_at(&up_free_at, now(), n) + latency_s;
    answer->at = is_command ? 0 : passes_at(&down_free_at, came, answer->stop - answer->start);
    connection->n_waiting++;
    push(answer);
    free(reply.headers.data);
    free(reply.text.data);
    free(path);
    free(bucket);
}

/* Answers the requests that have come whole. */
static void take_all(Connection *connection) {
    Text *in = &connection->in;
    for (char *head, *end; connection->n_used < in->n;) {
        head = in->data + connection->n_used;
        end = memmem(head, in->n - connection->n_used, "\r\n\r\n", 4);
        if (end == NULL) break;
        char kept = end[4];
        end[4] = 0; /* one byte after what has come is reserved */
        const char *length = header(head, "content-length");
        size_t n = length != NULL ? strtoul(length, NULL, 10) : 0, n_head = end + 4 - head;
        bool waits = header(head, "expect") != NULL && in->n - connection->n_used == n_head;
        end[4] = kept;
        if (waits && !connection->was_continued) {
            connection->was_continued = true;
            if (send(connection->fd, "HTTP/1.1 100 Continue\r\n\r\n", 25, MSG_NOSIGNAL) < 0) connection->is_closed = true;
        }
        if (in->n - connection->n_used < n_head + n) {
            reserve(in, n_head + n - (in->n - connection->n_used) + 2);
            break;
        }
        char after = end[4 + n];
        char *text = checked(strndup(head, n_head));
        take(connection, text, end + 4, n);
        free(text);
        end[4 + n] = after;
        connection->was_continued = false;
        connection->n_used += n_head + n;
    }
    if (connection->n_used == in->n) connection->n_used = in->n = 0;
}

static void receive(Connection *connection) {
    Text *in = &connection->in;
    for (;;) {
        reserve(in, (64 << 10) + 1);
        ssize_t n = recv(connection->fd, in->data + in->n, in->room - in->n - 1, 0);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && errno == EAGAIN) break;
        if (n <= 0) {
            connection->is_closed = true;
            return;
        }
        in->n += n;
        in->data[in->n] = 0;
        if (in->n + 1 < in->room) break; /* nothing is left */
    }
    take_all(connection);
}

static void accept_all(int server) {
    for (int fd; (fd = accept4(server, NULL, NULL, SOCK_NONBLOCK)) >= 0;) {
        Connection *connection = checked(calloc(1, sizeof *connection));
        int one = 1, room = 4 << 20;
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &room, sizeof room);
        connection->fd = fd;
        struct epoll_event event = {EPOLLIN, {.ptr = connection}};
        epoll_ctl(poll_fd, EPOLL_CTL_ADD, fd, &event);
    }
}

static void serve(int server) {
    struct epoll_event events[256];
    for (;;) {
        struct timespec wait = {3600, 0};
        if (n_heap) {
            double left = heap[0]->at - now();
            wait = left > 0 ? (struct timespec){(time_t)left, (long)((left - (time_t)left) * 1e9)} : (struct timespec){0, 0};
        }
        int n = epoll_pwait2(poll_fd, events, 256, &wait, NULL);
        for (int i = 0; i < n; i++) {
            Connection *connection = events[i].data.ptr;
            if (connection == NULL) {
                accept_all(server);
                continue;
            }
            if (connection->sending != NULL) send_some(connection->sending);
            if (events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) receive(connection);
            if (connection->is_closed) {
                epoll_ctl(poll_fd, EPOLL_CTL_DEL, connection->fd, NULL);
                if (connection->sending != NULL) finish(connection->sending);
                drop(connection);
            }
        }
        for (double time = now(); n_heap && heap[0]->at <= time;) {
            Connection *connection = heap[0]->connection;
            send_some(pop());
            drop(connection);
        }
    }
}

int main(int n, char **given) {
    if (n > 1) latency_s = atof(given[1]);
    if (n > 2) bytes_per_s = atof(given[2]);
    int server = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0), one = 1;
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof address;
    setsockopt(server, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(server, (struct sockaddr *)&address, length) || listen(server, 4096)) return perror("listen"), 1;
    getsockname(server, (struct sockaddr *)&address, &length);
    poll_fd = epoll_create1(0);
    struct epoll_event event = {EPOLLIN, {.ptr = NULL}};
    epoll_ctl(poll_fd, EPOLL_CTL_ADD, server, &event);
    printf("%d\n", ntohs(address.sin_port));
    fflush(stdout);
    serve(server);
}
